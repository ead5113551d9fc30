"""What a plan is: the record, its steps, the referee that replays them, reports, files and differences."""

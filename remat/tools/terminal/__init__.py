"""What all commands share: flags, progress, and how results come out."""

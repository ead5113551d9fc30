"""Asks policies for plans: budgets, loops, time limits, and what is fallen back on."""

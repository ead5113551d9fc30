"""Chains of stages: found in a problem, measured, and reversed by revolve or an exact dynamic program."""

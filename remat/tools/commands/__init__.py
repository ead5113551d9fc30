"""The commands of the command line, a module each: `register` adds it, with its flags and what runs it."""

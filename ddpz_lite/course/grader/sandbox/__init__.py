"""What a process is shut into: its walls, what it sees of the package, its limits, its end."""

"""Run folders: their files, the errors and results in them, and the states of runs. Imports no torch."""

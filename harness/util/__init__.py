"""What stands below every other room: text, files, locks, hardware facts. Imports nothing of the harness."""

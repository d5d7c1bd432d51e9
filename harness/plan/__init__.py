"""What a job will be like, before it costs anything: legality, memory, traffic, time."""

"""What a run shows and leaves: progress, metrics, pictures, and a timeline of all ranks."""

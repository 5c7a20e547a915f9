"""What a run shows and leaves: progress, metrics, pictures, and a trace of some steps."""

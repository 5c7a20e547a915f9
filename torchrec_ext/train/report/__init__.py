"""What a run shows and leaves: its progress, and its folder."""

"""What keeps a run from going wrong in silence: finite losses and gradients, loss scaling, and a watchdog."""

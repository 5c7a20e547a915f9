"""Submitting a job: what is refused beforehand, and what TorchX's schedulers leave out on Slurm and Kubernetes."""

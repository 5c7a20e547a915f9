"""Python imports this at its start if PYTHONPATH names this folder, so each process of a job has simulated GPUs."""

import simulated_cuda

simulated_cuda.install()

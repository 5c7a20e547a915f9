"""Several networks in one job: which members train on which ranks, alone or stacked."""

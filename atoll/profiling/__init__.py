"""The offline profile of a model: what compression and the total batch cost it in convergence (`atoll profile`)."""

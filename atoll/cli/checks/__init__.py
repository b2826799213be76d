"""The checks of `atoll doctor`: of this machine, of the cluster, of the way to it."""

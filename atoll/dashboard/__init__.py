"""The page of `atoll dashboard`: a small ASGI application beside a client of the cluster. It keeps nothing."""

"""The output of workers: read, limited, spooled and sent to the controller."""

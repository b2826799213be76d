"""gRPC servicers: they check messages and pass them on; no decisions here."""

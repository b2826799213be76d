"""Native kernels on float32 buffers; zero-copy from torch and NumPy, GIL released."""

"""Links between nodes: the pairs to measure, the measurements, and the islands that follow from them."""

"""Steps to estimates, as far as one machine can make them alone. Agents carry it out; the controller puts the machines
together, and does the same for those that tell it their steps one by one. Pure and incremental."""

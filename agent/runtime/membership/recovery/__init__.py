"""Recovery policies: ways in which the members of a new view come to one state. `choice.py` chooses among them."""

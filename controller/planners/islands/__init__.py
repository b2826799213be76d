"""Choose what islands exchange over thin links, and whether all of them should take part."""

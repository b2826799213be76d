"""The facts and pure rules about a job and its run that every part of the jobs' code reads."""

"""Pictures and tables of one run, and lists of what there is to run."""

"""Where the runs of a comparison are worked on."""

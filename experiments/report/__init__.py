"""`report`: one HTML page of a run, of several, or of a comparison, and its figures as files."""

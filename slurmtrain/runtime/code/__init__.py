"""The code of a run inside its job: a directory made from the snapshot that was taken when it was submitted."""

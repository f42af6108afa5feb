"""The client of Tandem: generate, chat and stream from Python, in one process or many."""

"""`parallel2d verify`: a mesh against one process, or against results computed elsewhere."""

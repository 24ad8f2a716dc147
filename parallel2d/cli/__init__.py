"""`parallel2d …` on the command line: the only room besides the recipes that sees models and parts."""

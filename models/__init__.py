"""Native models: one-device code that needs no edit to run on any mesh."""

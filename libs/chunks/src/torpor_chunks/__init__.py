"""Where the parts of checkpoints are kept, by their digest; hosts put and fetch them, the snapshot store frees them."""

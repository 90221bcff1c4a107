"""The reaper: owns clean-ups, of machines that are nobody's and of what ended machines still claim; acts on proof."""

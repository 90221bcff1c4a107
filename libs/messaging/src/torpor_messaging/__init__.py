"""Messages between Torpor's services and their users: subjects, envelope, who must act on an error, timers."""

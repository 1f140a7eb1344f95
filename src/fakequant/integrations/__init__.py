"""Callbacks for trainers of other libraries; each file needs its library."""

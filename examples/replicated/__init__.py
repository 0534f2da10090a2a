"""Replicas of a server on Ray Serve, in reading order: the beginnings of texts
(`prefixes`), who gets a request (`routing`), an engine of its own in each replica
(`replica`), the one address in front of them (`endpoint`), how many there are
(`scaling`), and the application (`application`). `prefixes` needs nothing of Ray.
"""

"""Replicas of a server on Ray Serve, in reading order: hashes of prefixes
(`prefixes`), the choice of a replica (`routing`), forwarded requests (`forwarding`),
the engine of a replica (`replica`), the HTTP endpoint (`endpoint`), autoscaling
(`scaling`), and the application (`application`). `prefixes` needs no Ray.
"""

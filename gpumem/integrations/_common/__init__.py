"""Helpers of several integrations. None of them imports another library before it is used."""

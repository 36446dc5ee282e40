"""Checks: does a converted step compute what its source computes?"""

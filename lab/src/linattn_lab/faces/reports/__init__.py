"""The ORL protocol, the report and pages of images."""

"""Reports as one HTML file: everything inside, nothing fetched."""

"""What people look at: everything here reads records, nothing here measures."""

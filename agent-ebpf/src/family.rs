//! Families of addresses, as sockets and their programs' contexts have them (`linux/socket.h`).

pub const AF_INET: u32 = 2;
pub const AF_INET6: u32 = 10;

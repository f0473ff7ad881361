//! Slices as they are kept: an endpoint takes 16 bytes with IPv4 instead of 32, and a large cluster has hundreds of thousands.

use crate::plan::services::{
    Endpoint, Slice,
    facts::{Condition, Place, SlicePort},
};
use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

/// A slice, equal if what it says is.
#[derive(Debug, PartialEq, Eq)]
pub struct Packed {
    ports: Arc<[SlicePort]>,
    endpoints: Endpoints,
}

#[derive(Debug, PartialEq, Eq)]
enum Endpoints {
    /// All of them are of that family, as a slice's are.
    V4(Box<[OfIpv4]>),
    Others(Box<[Endpoint]>),
}

#[derive(Debug, PartialEq, Eq)]
struct OfIpv4 {
    address: Ipv4Addr,
    condition: Condition,
    place: Arc<Place>,
}

impl Packed {
    /// As it was packed.
    pub fn open(&self) -> Slice {
        let endpoints = match &self.endpoints {
            Endpoints::V4(all) => all.iter().map(OfIpv4::open).collect(),
            Endpoints::Others(all) => all.clone(),
        };
        Slice {
            ports: self.ports.clone(),
            endpoints,
        }
    }
}

impl From<Slice> for Packed {
    fn from(slice: Slice) -> Self {
        let Slice { ports, endpoints } = slice;
        let packed: Option<Box<[OfIpv4]>> = endpoints.iter().map(OfIpv4::of).collect();
        let endpoints = match packed {
            Some(all) => Endpoints::V4(all),
            None => Endpoints::Others(endpoints),
        };
        Self { ports, endpoints }
    }
}

impl OfIpv4 {
    fn of(endpoint: &Endpoint) -> Option<Self> {
        let IpAddr::V4(address) = endpoint.address else {
            return None;
        };
        Some(Self {
            address,
            condition: endpoint.condition,
            place: endpoint.place.clone(),
        })
    }

    fn open(&self) -> Endpoint {
        Endpoint {
            address: self.address.into(),
            condition: self.condition,
            place: self.place.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(address: &str, condition: Condition) -> Endpoint {
        Endpoint {
            address: address.parse().unwrap(),
            condition,
            place: Arc::new(Place {
                node: address.into(),
                ..Place::default()
            }),
        }
    }

    #[test]
    fn what_is_opened_is_what_was_packed() {
        assert_eq!(size_of::<OfIpv4>(), 16);
        let v4 = [
            endpoint("10.0.0.1", Condition::READY),
            endpoint("10.0.0.2", Condition::SERVING),
        ];
        let v6 = [
            endpoint("fd00::1", Condition::READY),
            // Of IPv4, and yet no IPv4 address.
            endpoint("::ffff:10.0.0.1", Condition::TERMINATING),
        ];
        let mixed = [v4[0].clone(), v6[0].clone()];
        let mut all = Vec::new();
        for endpoints in [&v4[..], &v4[..1], &v6, &mixed, &[]] {
            let slice = Slice {
                endpoints: endpoints.into(),
                ..Slice::default()
            };
            let packed = Packed::from(slice.clone());
            assert_eq!(packed.open(), slice);
            assert_eq!(packed, Packed::from(slice));
            assert!(!all.contains(&packed));
            all.push(packed);
        }
    }
}

//! What speaks to the API server in the place of kubelets, administrators and other agents.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use sinabro_lab::Place;
use std::{
    io::{BufRead as _, BufReader},
    sync::Arc,
};
use ureq::{
    Agent, Body,
    http::{Request, Response},
    tls::{Certificate, RootCerts, TlsConfig},
};

const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// May be shared by threads; its connections are made in the network of one place.
#[derive(Clone)]
pub struct Client {
    agent: Agent,
    place: Place,
    server: String,
    authorization: String,
}

impl Client {
    pub fn new(place: &Place, server: &str, certificate: &str, token: &str) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let certificate = Certificate::from_pem(certificate.as_bytes())?;
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&[certificate]))
            .unversioned_rustls_crypto_provider(provider)
            .build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .max_idle_connections(64)
            .max_idle_connections_per_host(64)
            .build();
        Ok(Self {
            agent: config.into(),
            place: place.clone(),
            server: server.into(),
            authorization: format!("Bearer {token}"),
        })
    }

    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        self.call("GET", path, None)
    }

    pub fn create_node(&self, node: &Value) -> Result<()> {
        self.create("/api/v1/nodes?fieldManager=kubelet", node)
    }

    /// Makes an object in the collection at a path.
    pub fn create(&self, path: &str, object: &Value) -> Result<()> {
        self.call("POST", path, Some(("application/json", object)))?;
        Ok(())
    }

    /// Replaces fields of the object at a path.
    pub fn replace_in(&self, path: &str, patch: &Value) -> Result<()> {
        self.call("PATCH", path, Some((MERGE, patch)))?;
        Ok(())
    }

    /// As a kubelet writes what it reports.
    pub fn patch_status(&self, name: &str, patch: &Value) -> Result<()> {
        let path = format!("/api/v1/nodes/{name}/status?fieldManager=kubelet");
        self.call("PATCH", &path, Some((STRATEGIC, patch)))?;
        Ok(())
    }

    /// The same for what a strategic patch would add to.
    pub fn replace_in_status(&self, name: &str, patch: &Value) -> Result<()> {
        self.replace_in(&format!("/api/v1/nodes/{name}/status"), patch)
    }

    pub fn delete_node(&self, name: &str) -> Result<()> {
        self.call("DELETE", &format!("/api/v1/nodes/{name}"), None)?;
        Ok(())
    }

    fn call(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> Result<Vec<u8>> {
        let call = || -> Result<Vec<u8>> {
            let mut response = self.place.run(|| self.send(method, path, body))?;
            let status = response.status();
            let body = response.body_mut().with_config().limit(u64::MAX);
            let body = body.read_to_vec()?;
            let text = || String::from_utf8_lossy(&body[..body.len().min(500)]).into_owned();
            ensure!(status.is_success(), "{status}: {}", text());
            Ok(body)
        };
        call().with_context(|| format!("{method} {path}"))
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Response<Body>> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.server))
            .header("Authorization", &self.authorization);
        Ok(match body {
            Some((kind, body)) => {
                let request = request.header("Content-Type", kind);
                self.agent.run(request.body(body.to_string())?)?
            }
            None => self.agent.run(request.body(())?)?,
        })
    }

    /// Reads an answer in lines as it comes, to the one that begins and goes on so, if that is
    /// given; its bytes.
    pub fn read(&self, path: &str, last: Option<(&str, &str)>) -> Result<usize> {
        let read = || -> Result<usize> {
            let response = self.place.run(|| self.send("GET", path, None))?;
            ensure!(response.status().is_success(), "{}", response.status());
            let reader = response.into_body().into_reader();
            let mut lines = BufReader::with_capacity(1 << 16, reader);
            let (mut line, mut bytes) = (Vec::new(), 0);
            loop {
                line.clear();
                let read = lines.read_until(b'\n', &mut line)?;
                bytes += read;
                let is_last = |(begin, within): (&str, &str)| {
                    line.starts_with(begin.as_bytes())
                        && line.windows(within.len()).any(|w| w == within.as_bytes())
                };
                if read == 0 || last.is_some_and(is_last) {
                    return Ok(bytes);
                }
            }
        };
        read().with_context(|| format!("GET {path}"))
    }
}

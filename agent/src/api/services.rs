//! What is asked about Services.

use super::status::Core;
use crate::{
    datapath::Translation,
    plan::services::{ServiceName, why::Unused},
    run::services,
};
use sinabro_common::api::{
    ApiError, ErrorCode, Request, Response, SERVICE_ENDPOINTS_OF_A_SET, ServiceUsage,
    UnusedEndpoint,
};

/// Answers such a request; none if it is another.
pub fn answer(core: &Core, request: &Request) -> Option<Result<Response, ApiError>> {
    let Request::Services { after, only } = request else {
        return None;
    };
    Some(page(core, after.as_deref(), only.as_deref()))
}

fn page(core: &Core, after: Option<&str>, only: Option<&str>) -> Result<Response, ApiError> {
    // What was translated may have gone on until it ended.
    let is_over = !core.settings.service_proxy.may_be_on()
        && matches!(core.datapath.translation(), Ok(Translation::Off));
    let Some(known) = core.services.as_ref().filter(|_| !is_over) else {
        let text = "this node's Services are not translated by Sinabro (serviceProxy: off)";
        return Err(ApiError::new(ErrorCode::Invalid, text));
    };
    let after = after.map(name).transpose()?;
    let only = only.map(name).transpose()?;
    let mut page = services::lock(&known.publisher).page(after.as_ref(), only.as_ref());
    if let Some(only) = &only
        && let Some(facts) = &known.facts
        && let Some(report) = page.services.first_mut()
    {
        let unused = facts.unused(only).into_iter();
        let unused = unused.take(SERVICE_ENDPOINTS_OF_A_SET);
        report.unused = unused.map(reported).collect();
    }
    match &only {
        Some(only) if page.services.is_empty() => {
            let text =
                format!("there is no service {only} that has an address, or it is not known yet");
            Err(ApiError::new(ErrorCode::NotFound, text))
        }
        _ => Ok(Response::Services(page)),
    }
}

fn reported(unused: Unused) -> UnusedEndpoint {
    UnusedEndpoint {
        port: unused.port,
        endpoint: unused.at,
        why: unused.why,
    }
}

fn name(text: &str) -> Result<ServiceName, ApiError> {
    let parts = text.split_once('/');
    let parts = parts.map(|(namespace, name)| ServiceName::new(namespace, name));
    parts.ok_or_else(|| {
        let text = format!("`{text}` is not NAMESPACE/NAME of a service");
        ApiError::new(ErrorCode::Invalid, text)
    })
}

/// None where others translate.
pub fn usage(core: &Core) -> Option<ServiceUsage> {
    let known = core.services.as_ref()?;
    Some(services::lock(&known.publisher).usage_report())
}

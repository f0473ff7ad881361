//! What is watched, and who keeps what comes of it.

use serde::de::DeserializeOwned;
use std::{fmt::Debug, future::Future};

/// Keeps what is known of one kind of objects.
pub(in crate::watch) trait Keep: Send + 'static {
    /// An object, of which no more need be read than is kept.
    type Object: Clone + Debug + DeserializeOwned + Send + 'static;
    /// What a list has told so far.
    type List: Send + 'static;
    /// Where the server has all of them.
    const PATH: &str;
    /// Which of them are wanted.
    const SELECTOR: Option<&str>;
    /// For people: one of them and several.
    const NAMES: [&str; 2];
    /// Whether a server may be without them, or keep them to itself.
    const MAY_BE_ABSENT: bool = false;

    /// An object's resourceVersion.
    fn version(object: &Self::Object) -> &str;

    /// All objects are about to be told.
    fn begin_list(&mut self) -> Self::List;
    /// A list has this object.
    fn listed(list: &mut Self::List, object: &Self::Object);
    /// It was deleted before the list was over.
    fn unlisted(list: &mut Self::List, object: &Self::Object);
    /// The list is whole; a list that is not comes to nothing but its end.
    fn end_list(&mut self, list: Self::List);

    /// An object came, or `changed`; whether that is news to publish.
    fn present(&mut self, object: &Self::Object, changed: bool) -> bool;
    /// An object was deleted; whether that is news to publish.
    fn gone(&mut self, object: &Self::Object) -> bool;
    /// Publishes the news, of which several may have come together.
    fn publish(&mut self);

    /// How many there are.
    fn count(&self) -> usize;
    /// How many agents do as this one does, as far as that shows.
    fn agents(&self) -> usize;
    /// Whether there is something that stays in use while the server is away.
    fn has_facts(&self) -> bool;
    /// The server answers, or why it does not and since when.
    fn report(&mut self, problem: Option<(String, std::time::SystemTime)>);
    /// Until nobody wants to know any more.
    fn closed(&self) -> impl Future<Output = ()> + Send + use<Self>;
}

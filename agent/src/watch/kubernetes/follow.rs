//! One watch from its beginning to its end: all objects, where they are asked for, and then changes.

use super::{
    Keep, LIST_SILENCE, LONGEST_PAUSE, PAUSE, Point, Watcher,
    error::WatchError,
    events::{Event, Events},
};
use tokio::time::Instant;

impl<K: Keep> Watcher<K> {
    /// Follows one watch until it ends; [`Watcher::point`] moves with it.
    pub(super) async fn follow(&mut self) -> Result<(), WatchError> {
        let mut events = match self.point.clone() {
            Point::After(version) => self.begin(&version, false).await?,
            Point::Lost { not_before } if self.streams => {
                let mut events = self.begin(&not_before, true).await?;
                let listed = self.take_list(&mut events).await?;
                self.replace(listed);
                events
            }
            Point::Lost { not_before } => {
                let (listed, version) = self.list(&not_before).await?;
                self.replace((listed, version.clone()));
                self.begin(&version, false).await?
            }
        };
        self.connected();
        self.take_changes(&mut events).await
    }

    /// Takes a whole list for what was known.
    fn replace(&mut self, (listed, version): (K::List, String)) {
        self.keeper.end_list(listed);
        self.point = Point::After(version);
        self.keeper.publish();
    }

    /// The objects that a watch begins with; half a list is none.
    async fn take_list(&mut self, events: &mut Events<K>) -> Result<(K::List, String), WatchError> {
        let mut listed = self.keeper.begin_list();
        loop {
            let event = match events.next(Instant::now() + LIST_SILENCE).await {
                Err(WatchError::Silent) => {
                    // So it is where a server does not know the parameter.
                    self.streams = false;
                    return Err(WatchError::Silent);
                }
                event => event?,
            };
            match event {
                Some(Event::Present { object, .. }) => K::listed(&mut listed, &object),
                Some(Event::Gone(object)) => K::unlisted(&mut listed, &object),
                Some(Event::Bookmark { version, ends_list }) if ends_list => {
                    return Ok((listed, version));
                }
                Some(Event::Bookmark { .. }) => {}
                None => return Err(WatchError::TooShort),
            }
        }
    }

    /// Takes changes until the watch ends, and publishes those that are news.
    pub(super) async fn take_changes(&mut self, events: &mut Events<K>) -> Result<(), WatchError> {
        let mut unpublished: Option<Unpublished> = None;
        loop {
            let now = Instant::now();
            if unpublished.is_some_and(|news| news.due() <= now) {
                unpublished = None;
                self.keeper.publish();
            }
            let until = unpublished.map_or(now + self.silence, |news| news.due());
            let event = match events.next(until).await {
                Err(WatchError::Silent) if unpublished.is_some() => continue,
                Ok(Some(event)) => event,
                over => {
                    // The next watch goes on behind what was understood so far.
                    if unpublished.is_some() {
                        self.keeper.publish();
                    }
                    return over.map(|_| ());
                }
            };
            let (version, news) = match event {
                Event::Present { object, changed } => {
                    let news = self.keeper.present(&object, changed);
                    (K::version(&object).to_owned(), news)
                }
                Event::Gone(object) => {
                    let news = self.keeper.gone(&object);
                    (K::version(&object).to_owned(), news)
                }
                Event::Bookmark { version, .. } => (version, false),
            };
            self.point = Point::After(version);
            unpublished = Unpublished::after(unpublished, news, Instant::now());
        }
    }
}

/// Changes that are not published yet: when the first and the last of them came. What is no news
/// does not count; in a large cluster a heartbeat comes at every moment.
#[derive(Clone, Copy, Debug)]
struct Unpublished {
    first: Instant,
    last: Instant,
}

impl Unpublished {
    /// What is unpublished after one more event.
    fn after(before: Option<Self>, news: bool, now: Instant) -> Option<Self> {
        if !news {
            return before;
        }
        let first = before.map_or(now, |before| before.first);
        Some(Self { first, last: now })
    }

    fn due(self) -> Instant {
        (self.last + PAUSE).min(self.first + LONGEST_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_change_waits_for_further_changes_and_for_no_heartbeat() {
        let start = Instant::now();
        let step = PAUSE / 5;
        let mut beaten = Unpublished::after(None, false, start);
        assert!(beaten.is_none());
        beaten = Unpublished::after(beaten, true, start);
        let mut changed = beaten;
        for n in 1..100 {
            beaten = Unpublished::after(beaten, false, start + step * n);
            changed = Unpublished::after(changed, true, start + step * n);
        }
        let waits = |news: Option<Unpublished>| news.map_or(Duration::MAX, |n| n.due() - start);
        assert_eq!(waits(beaten), PAUSE);
        assert_eq!(waits(changed), LONGEST_PAUSE);
    }
}

//! Tests of conditional writes and copies: a taken name is refused, and of several racers exactly one wins.

use super::{AbilityState, E, Prober, StateAndDetail, Stop, TestResult, lies, refused};
use crate::store::errors::is_taken;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion,
};
use std::sync::Arc;
use tokio::task::JoinSet;

/// Writers that race for one name.
const RACERS: usize = 8;
/// Races, each for another name.
const ROUNDS: usize = 3;

/// Judges a request whose condition does not hold: the store must refuse it. `lie` describes a success.
fn expect_refusal<T>(result: Result<T, E>, action: &str, lie: &str) -> Result<(), Stop> {
    match result {
        Err(e) if is_taken(&e) => Ok(()),
        Err(e) => Err(refused(action)(e)),
        Ok(_) => lies(lie),
    }
}

/// Judges a race for a free name: the racers that the store told that they won, the number of refusals, and
/// the racer whose content is there.
fn judge_race(
    winners: &[usize],
    refusals: usize,
    content: Option<usize>,
) -> Result<(), StateAndDetail> {
    let lies = |detail: String| Err((AbilityState::Lies, detail));
    match (winners, content) {
        (_, None) => lies(format!(
            "{RACERS} writers raced for one free name, {} of them succeeded, and no content of theirs is there",
            winners.len()
        )),
        ([winner], Some(written)) if *winner == written => Ok(()),
        ([_], Some(_)) => lies(format!(
            "{RACERS} writers raced for one free name, one of them succeeded, and another's content is there"
        )),
        // The winner's response was lost, and its retry was refused.
        ([], Some(_)) if refusals == RACERS => Ok(()),
        ([], Some(_)) => lies(
            "several writers raced for one free name: one wrote the object and got an error"
                .to_owned(),
        ),
        (several, Some(_)) => lies(format!(
            "{RACERS} writers raced for one free name, and {} of them succeeded: all but one were overwritten",
            several.len()
        )),
    }
}

/// Writes an object if its name is free.
async fn create(inner: Arc<dyn ObjectStore>, path: Path, text: String) -> Result<(), E> {
    let put = inner.put_opts(&path, text.into(), PutMode::Create.into());
    put.await.map(|_| ())
}

impl Prober {
    pub(super) async fn create(&mut self) -> TestResult {
        let action = "write an object on condition that its name is free";
        let (_, path) = self.name("create");
        let inner = self.store.inner.clone();
        let create = |path: &Path, text: String| create(inner.clone(), path.clone(), text);
        let first = create(&path, "first".to_owned()).await;
        first.map_err(refused(action))?;
        expect_refusal(
            create(&path, "second".to_owned()).await,
            action,
            "the store ignores the condition that a name is free: it overwrote an object",
        )?;
        let racer = |i, path: &Path| create(path, format!("racer {i}"));
        self.race("race", racer).await?;
        Ok(format!(
            "in {ROUNDS} races of {RACERS} writers for a free name, exactly one succeeded"
        ))
    }

    /// Lets several writers race for a free name, some times.
    async fn race<F>(&mut self, hint: &str, racer: impl Fn(usize, &Path) -> F) -> Result<(), Stop>
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
    {
        for _ in 0..ROUNDS {
            let (_, path) = self.name(hint);
            let mut racers = JoinSet::new();
            for i in 0..RACERS {
                let racer = racer(i, &path);
                racers.spawn(async move { (i, racer.await) });
            }
            let (mut winners, mut refusals) = (Vec::new(), 0);
            while let Some(joined) = racers.join_next().await {
                match joined {
                    Ok((i, Ok(()))) => winners.push(i),
                    Ok((_, Err(e))) if is_taken(&e) => refusals += 1,
                    Ok((_, Err(e))) => {
                        return Err(refused("write at the same time as others")(e));
                    }
                    Err(_) => {}
                }
            }
            let content = match self.get(&path).await {
                Ok(bytes) => racer_of(&bytes),
                Err(Stop::Found((AbilityState::Lies, _))) => None,
                Err(stop) => return Err(stop),
            };
            judge_race(&winners, refusals, content).map_err(Stop::Found)?;
        }
        Ok(())
    }

    pub(super) async fn update(&mut self) -> TestResult {
        if self.store.local_root.is_some() {
            return Ok("a local folder needs no conditions: it locks files".to_owned());
        }
        let action = "write an object on condition that it is unchanged";
        let (_, path) = self.name("update");
        let inner = self.store.inner.clone();
        let put = |text: &'static str, version: UpdateVersion| {
            inner.put_opts(&path, text.into(), PutMode::Update(version).into())
        };
        let first = inner.put(&path, "first".into()).await;
        let first = UpdateVersion::from(first.map_err(refused(action))?);
        match put("second", first.clone()).await {
            Err(e) if is_taken(&e) => {
                return lies(
                    "the store refused to replace an unchanged object: it says that it has changed",
                );
            }
            second => second.map_err(refused(action))?,
        };
        expect_refusal(
            put("third", first).await,
            action,
            "the store ignores the condition that an object is unchanged: it overwrote a changed object",
        )?;
        match self.get(&path).await? == "second".as_bytes() {
            true => Ok("a writer that has not seen the last change is refused".to_owned()),
            false => lies("the store refused to replace a changed object, and replaced it"),
        }
    }

    pub(super) async fn copy(&mut self, taken: &str) -> TestResult {
        let action = "copy an object on condition that the new name is free";
        let inner = self.store.inner.clone();
        let mut sources = Vec::new();
        for i in 0..RACERS {
            let (_, path) = self.name("source");
            let text = PutPayload::from(format!("racer {i}"));
            inner.put(&path, text).await.map_err(refused(action))?;
            sources.push(path);
        }
        let copy = |i: usize, to: &Path| {
            let (inner, source, to) = (inner.clone(), sources[i].clone(), to.clone());
            let options = CopyOptions::new().with_mode(CopyMode::Create);
            async move { inner.copy_opts(&source, &to, options).await }
        };
        expect_refusal(
            copy(0, &self.store.path(taken)).await,
            action,
            "the store ignores the condition that a copy's name is free: it overwrote an object",
        )?;
        self.race("copy", copy).await?;
        Ok(format!(
            "in {ROUNDS} races of {RACERS} copies to a free name, exactly one succeeded"
        ))
    }
}

/// Reads the number of the racer that wrote an object.
fn racer_of(content: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(content).ok()?;
    text.strip_prefix("racer ")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn exactly_one_racer_wins() {
        let judge = |winners: &[usize], refusals, content| judge_race(winners, refusals, content);
        assert_eq!(judge(&[3], 7, Some(3)), Ok(()));
        assert_eq!(judge(&[], 8, Some(3)), Ok(()));
        for (winners, refusals, content) in [
            (&[3][..], 7, Some(4)),
            (&[3], 7, None),
            (&[3, 4], 6, Some(4)),
            (&[0, 1, 2, 3, 4, 5, 6, 7], 0, Some(7)),
            (&[], 8, None),
        ] {
            let (state, detail) = judge(winners, refusals, content).unwrap_err();
            assert_eq!(
                state,
                AbilityState::Lies,
                "{winners:?} {content:?}: {detail}"
            );
        }
    }
}

//! Changes of an input that leave it JSON.
//!
//! Whatever the engine does to bytes, hardly any JSON is JSON afterwards: what it keeps is then a
//! thousand ways to break the syntax, and nothing is found behind the parser. Here one place of the
//! document is changed and the rest stays.

use serde_json::{Value, json};

/// The input with one place of its document changed; none if it has no document. What is before
/// the document (a length, variables) and behind it stays. `text` changes a text as it likes.
pub fn mutate(input: &[u8], seed: u32, mut text: impl FnMut(&str) -> String) -> Option<Vec<u8>> {
    let start = input.iter().position(|byte| matches!(byte, b'{' | b'['))?;
    let (head, rest) = input.split_at(start);
    let mut documents = serde_json::Deserializer::from_slice(rest).into_iter::<Value>();
    let mut document = documents.next()?.ok()?;
    let tail = &rest[documents.byte_offset()..];
    let mut seed = Seed(seed);

    let count = places(&document);
    let other = place(&mut document, &mut seed.below(count))?.clone();
    let chosen = place(&mut document, &mut seed.below(count))?;
    change(chosen, &mut seed, other, &mut text);
    let document = serde_json::to_vec(&document).ok()?;
    Some([head, &document, tail].concat())
}

/// A choice after the other from one number (a linear congruential generator, Knuth's MMIX).
struct Seed(u32);

impl Seed {
    fn below(&mut self, end: usize) -> usize {
        let next = u64::from(self.0)
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 = (next >> 32) as u32;
        self.0 as usize % end.max(1)
    }
}

fn change(place: &mut Value, seed: &mut Seed, other: Value, text: &mut impl FnMut(&str) -> String) {
    // Now and then it becomes something else altogether.
    if seed.below(8) == 0 {
        *place = match seed.below(3) {
            0 => Value::Null,
            1 => json!({}),
            _ => other,
        };
        return;
    }
    match place {
        Value::Null => *place = json!([]),
        Value::Bool(bool) => *bool = !*bool,
        Value::Number(_) => {
            let numbers = [
                json!(0),
                json!(-1),
                json!(seed.below(300)),
                json!(seed.below(1 << 20)),
                json!(u64::MAX),
                json!(0.5),
            ];
            let chosen = seed.below(numbers.len());
            *place = numbers[chosen].clone();
        }
        Value::String(found) => match other {
            // One of the document's own: more likely of use than bytes of nobody.
            Value::String(other) if seed.below(3) == 0 => found.push_str(&other),
            _ => *found = text(found),
        },
        Value::Array(elements) => match seed.below(3) {
            0 if !elements.is_empty() => {
                elements.remove(seed.below(elements.len()));
            }
            1 => elements.push(other),
            _ => elements.reverse(),
        },
        Value::Object(fields) => {
            let key = fields.keys().nth(seed.below(fields.len())).cloned();
            let Some(key) = key else { return };
            let value = fields.remove(&key);
            if let Some(value) = value
                && seed.below(2) == 0
            {
                fields.insert(text(&key), value);
            }
        }
    }
}

/// How many values there are, the document itself among them.
fn places(value: &Value) -> usize {
    1 + match value {
        Value::Array(elements) => elements.iter().map(places).sum::<usize>(),
        Value::Object(fields) => fields.values().map(places).sum(),
        _ => 0,
    }
}

/// The value of a number, in the order of the document.
fn place<'a>(value: &'a mut Value, number: &mut usize) -> Option<&'a mut Value> {
    if *number == 0 {
        return Some(value);
    }
    *number -= 1;
    let mut below: Box<dyn Iterator<Item = &'a mut Value>> = match value {
        Value::Array(elements) => Box::new(elements.iter_mut()),
        Value::Object(fields) => Box::new(fields.values_mut()),
        _ => return None,
    };
    below.find_map(|value| place(value, number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn what_was_json_is_json_and_its_surroundings_stay() {
        let document = br#"{"a": [1, "x", null], "b": {"c": true}}"#;
        let input = [&b"KEY=VALUE\n\n"[..], document, b" tail"].concat();
        let mut found = BTreeSet::new();
        for seed in 0..2000 {
            let changed = mutate(&input, seed, |text| format!("{text}y")).unwrap();
            let document = changed.strip_prefix(b"KEY=VALUE\n\n").unwrap();
            let document = document.strip_suffix(b" tail").unwrap();
            let document: Value = serde_json::from_slice(document).unwrap();
            found.insert(document.to_string());
        }
        // Every place, in more than one way.
        assert!(found.len() > 30, "{}", found.len());
        assert!(found.contains(r#"{"a":[1,"xy",null],"b":{"c":true}}"#));
        assert!(found.contains(r#"{"a":[1,"x",null],"b":{"c":false}}"#));
        assert!(found.contains(r#"{"b":{"c":true}}"#));
    }

    #[test]
    fn what_has_no_document_is_left_to_the_engine() {
        for input in [&b""[..], b"- name: n1", b"\0\0\0\x02{", b"{]", b"x"] {
            assert_eq!(mutate(input, 7, str::to_owned), None);
        }
    }
}

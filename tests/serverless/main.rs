#[path = "../support/mod.rs"]
mod support;

mod copy_plan;
mod corrupted_database;
mod corrupted_input;
mod decompression_bombs;
mod delta_writer;
mod documents;
mod fold_equals_model;
mod forked_history;
mod frozen;
mod frozen_prefix;
mod fuzz_corpus;
mod gc_attacks;
mod help_pages;
mod hostile_bucket;
mod irregular_backups;
mod local_stores;
mod long_chains;
mod manifests;
mod metrics;
mod mounted_secrets;
mod request_counts;
mod restore_candidates;
mod schemas;
mod slow_store;
mod stores_conform;

#[path = "../support/mod.rs"]
mod support;

mod book;
mod controller_interrupted;
mod controller_leases;
mod controller_replicas;
mod controller_reports;
mod controller_story;
mod controller_tasks;
mod explore_page;
mod explored_history;
mod foreign_objects;
mod in_cluster;
mod jobs_in_kubernetes;
mod lock_leases;
mod manifests;
mod more_servers;
mod packages;
mod privileges;
mod recovered_objects;
mod restored_kubernetes;
mod rights;
mod snapshot_leases;
mod soak;
mod stored_objects;
mod task_commands;
mod tenants;

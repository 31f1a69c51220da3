//! The list of checks, and what is made of it.

/// Makes something of every check, for one backend, which is named by an absolute path.
///
/// `conformance_suite!(host_threads, graph_ep_tests::HostThreads)` makes a module of `#[test]`s, for a
/// backend that every machine has: libtest takes a check that is skipped for passed.
/// `conformance_suite!(list graph_ep_tests::HostProcesses)` is a
/// `Vec<`[`Check`](crate::harness::Check)`>`, for a program that is its own harness.
#[macro_export]
macro_rules! conformance_suite {
    (list $backend:ty) => {
        $crate::conformance_suite! { @checks list list, $backend }
    };
    ($suite:ident, $backend:ty) => {
        $crate::conformance_suite! { @checks tests $suite, $backend }
    };
    (@tests $suite:ident, $backend:ty; $($group:ident: $($check:ident),* ;)*) => {
        mod $suite {
            $(mod $group {
                $(
                    #[test]
                    fn $check() {
                        $crate::harness::test(
                            concat!(stringify!($group), "::", stringify!($check)),
                            $crate::checks::$group::$check::<$backend>,
                        );
                    }
                )*
            })*
        }
    };
    (@list $suite:ident, $backend:ty; $($group:ident: $($check:ident),* ;)*) => {
        vec![$($(
            $crate::harness::Check {
                name: concat!(stringify!($group), "::", stringify!($check)),
                run: || {
                    if let Some(why) = <$backend as $crate::TestBackend>::missing() {
                        $crate::harness::skip(why);
                    }
                    $crate::checks::$group::$check::<$backend>();
                },
            },
        )*)*]
    };
    (@checks $form:ident $suite:ident, $backend:ty) => {
        $crate::conformance_suite! { @$form $suite, $backend;
            modes:
                eager_equals_the_oracle,
                static_equals_the_oracle,
                truncation_equals_the_oracle,
                the_required_rows_are_enough_and_no_fewer_are,
                all_modes_give_the_same_bits,
                replays_equal_direct_steps,
                runs_repeat_bit_for_bit,
                the_layer_of_the_facade_equals_the_oracle;
            shapes:
                one_to_sixteen_ranks,
                experts_that_do_not_divide,
                experts_placed_by_a_list,
                top_one_and_top_all,
                ranks_without_tokens,
                bad_ids_are_counted_and_ignored,
                wide_ids,
                no_weights,
                staged_tokens,
                alignments,
                number_formats,
                device_counts_below_the_most,
                more_tokens_than_the_most_are_a_fault,
                wrong_arguments_are_refused,
                misaligned_words_are_refused,
                a_short_output_is_refused,
                rows_that_may_lack_memory_are_refused,
                settings_out_of_range_are_refused,
                synthetic_experts_refuse_what_they_cannot_read;
            payloads:
                bytes_and_scales_arrive_as_they_were,
                staged_rows_and_scales,
                fp8_rows_are_quantised_on_the_way,
                other_number_formats_in_every_mode,
                sums_that_round_to_zero,
                missing_and_short_scales_are_refused,
                tokens_across_the_staging_area_are_refused;
            layouts:
                flat_rows_equal_the_oracle,
                flat_rows_are_truncated_to_whole_groups,
                weights_beside_grouped_rows_equal_the_oracle,
                every_payload_in_every_layout,
                every_alignment_in_every_layout,
                padding_that_is_left;
            backward:
                gradients_equal_the_oracle,
                gradients_on_one_to_eight_ranks,
                handles_are_kept_until_their_backward_pass,
                a_forward_and_a_backward_pass_at_once,
                dropped_rows_have_no_gradients,
                rounds_give_the_same_gradients,
                backward_passes_that_cannot_be_are_refused;
            kept:
                a_refused_dispatch_changes_no_handle,
                gradients_of_fewer_tokens_than_were_sent_are_a_fault,
                gradients_of_fewer_rows_than_were_received_are_a_fault,
                a_combine_of_more_than_it_has_memory_for_is_a_fault,
                a_trim_ends_what_handles_hold,
                handles_that_rounds_filled_are_refused,
                a_handle_that_another_step_fills_is_refused;
            maps:
                maps_change_under_one_graph,
                moving_experts_changes_no_bit_of_their_sums,
                copies_share_the_load,
                maps_change_between_recovered_steps_and_rounds,
                maps_that_do_not_fit_are_refused;
            resize:
                a_resized_group_takes_more_tokens,
                a_resized_group_holds_what_is_reported,
                a_resize_without_memory_refuses_on_all_ranks,
                resizes_that_differ_are_named,
                a_resized_group_keeps_its_expert_map,
                a_size_out_of_range_refuses_on_all_ranks;
            rounds:
                rounds_equal_the_oracle,
                rounds_on_one_to_eight_ranks,
                rounds_without_room_for_a_token_are_refused,
                rounds_outside_a_recording_are_refused;
            lanes:
                two_lanes_in_turn,
                two_lanes_at_once,
                a_second_dispatch_on_an_open_lane_is_refused,
                a_combine_without_its_dispatch_is_refused,
                an_open_handle_cannot_be_filled_again,
                a_handle_of_another_dispatcher_is_refused,
                a_lane_of_another_dispatcher_is_refused,
                a_step_that_ends_in_a_dispatch_has_one_verdict,
                a_lane_serves_steps_with_and_without_combine;
            streams:
                two_lanes_on_two_streams,
                a_dispatch_beside_the_experts_of_another_lane;
            budgets:
                whole_sums_on_few_multiprocessors,
                a_lane_says_what_a_budget_leaves_it;
            halves:
                halves_equal_the_oracle,
                every_rank_splits_as_it_likes,
                halves_one_after_the_other_never_wait,
                halves_out_of_order_are_refused,
                second_halves_with_other_arguments_are_refused;
            epochs:
                epochs_wrap,
                step_numbers_wrap,
                records_stay_until_the_ring_comes_round,
                many_steps_in_flight;
            capture:
                eager_steps_are_refused,
                host_transfers_are_refused,
                a_panic_in_the_body_leaves_the_stream_usable,
                an_error_of_the_body_leaves_the_stream_usable,
                recording_runs_nothing,
                growth_makes_a_graph_shaped_by_capacity_stale,
                growth_leaves_a_device_counted_graph_current,
                a_graph_for_a_plan_is_current_once_it_holds,
                a_graph_owns_what_it_captured,
                no_replay_races_a_change_of_capacity,
                graphs_of_several_sizes_share_a_lane;
            embedded:
                embedded_steps_equal_the_oracle,
                embedding_neither_blocks_nor_allocates,
                steps_in_pieces_equal_the_oracle,
                embedded_rounds_equal_the_oracle,
                stale_replays_are_told_to_all_ranks,
                a_capacity_that_changes_within_a_launch_is_told_to_all_ranks,
                stale_rounds_are_told_to_all_ranks,
                steps_behind_a_stale_one_drain,
                device_counted_steps_stay_current,
                untold_replays_are_followed,
                a_launch_is_counted_once_whoever_looks_meanwhile,
                what_cannot_be_embedded_is_refused,
                part_of_a_step_is_in_no_graph,
                the_engines_graph_keeps_what_it_uses;
            nested:
                exchanged_steps_are_in_no_graph,
                exchanged_steps_spoil_the_capture_of_an_engine,
                a_runner_whose_body_exchanges_its_step_is_told;
            engines:
                engines_recover_their_own_graphs,
                engines_run_ahead,
                steps_behind_a_stale_one_are_launched_again,
                steps_that_no_replay_fits_run_eagerly_or_are_refused,
                a_capture_that_fails_refuses_on_all_ranks,
                captures_of_another_step_are_refused,
                engines_follow_every_policy;
            run_ahead:
                steps_behind_an_over_budget_one_drain,
                clean_steps_run_ahead,
                nothing_is_held_back_unasked,
                a_sliding_window_keeps_its_order,
                steps_in_flight_are_bounded_by_the_ring,
                steps_that_nobody_settles_are_recovered,
                steps_behind_a_refused_one_run,
                steps_behind_an_over_budget_one_of_others_wait,
                steps_that_passed_one_of_their_runner_are_told,
                runners_keep_the_order_of_each_other,
                graphs_replayed_by_hand_take_their_place,
                a_step_behind_a_held_one_of_another_runner_stays_in_flight;
            recovery:
                recovery_follows_the_simulation,
                growth_is_recorded_where_it_must_be,
                adjustments_follow_the_simulation,
                growth_stays_within_its_limit,
                shrinking_gives_memory_back,
                ranks_may_differ_in_capacity;
            uneven:
                uneven_ranks_follow_the_simulation,
                uneven_ranks_make_trips_of_their_own;
            refusal:
                hooks_are_called_once_an_attempt,
                a_failing_hook_refuses_on_all_ranks,
                a_limit_in_rows_refuses_on_all_ranks,
                memory_that_runs_out_refuses_on_all_ranks,
                recovery_settings_that_differ_are_named,
                eager_mode_is_the_last_resort,
                a_body_that_cannot_be_recorded_again_runs_eagerly,
                an_eager_run_beyond_its_limit_is_refused_beforehand,
                a_runner_runs_eagerly_when_asked,
                the_policy_drop_keeps_what_fits,
                the_policy_fail_reports_and_goes_on,
                the_policy_fail_grows_ahead_where_asked,
                an_invalidated_runner_records_once;
            trust:
                what_follows_an_overflow_is_not_believed,
                independent_routing_counts_every_dispatch,
                hooks_follow_every_attempt,
                looking_ahead_is_by_the_run_that_was_kept,
                an_overflow_among_layers_in_flight_is_recovered,
                too_few_replays_end_in_an_eager_run;
            failure:
                a_rank_that_never_dispatches_is_blamed,
                a_rank_that_never_combines_is_blamed,
                a_rank_that_never_acknowledges_is_blamed,
                an_abort_ends_the_step_on_every_rank,
                an_operation_that_breaks_is_reported,
                a_runner_reports_the_operation_that_breaks,
                a_rank_missing_from_an_agreement_is_named,
                a_rank_that_leaves_ends_an_agreement,
                ranks_in_different_steps_find_out,
                ranks_in_different_modes_find_out,
                an_eager_step_without_room_is_given_up,
                an_eager_body_that_fails_is_told_to_all,
                a_runner_says_what_an_eager_step_lacks,
                a_dispatch_that_is_given_up_brings_no_rows,
                a_new_group_works_after_a_failed_one;
            stalls:
                a_rank_that_stalls_in_its_experts_is_blamed,
                a_rank_that_stalls_in_rounds_is_blamed,
                a_rank_that_never_begins_its_rounds_is_blamed,
                an_abort_ends_a_step_whose_experts_stall,
                an_abort_ends_rounds_that_stall,
                a_new_group_works_after_one_that_stalled;
            setup:
                settings_that_differ_are_named,
                a_rank_missing_from_set_up_is_named,
                memory_that_runs_out_in_set_up_fails_on_all_ranks,
                the_memory_report_is_what_is_charged,
                a_memory_limit_is_held_to_the_report,
                a_memory_limit_of_one_rank_stops_all,
                clean_steps_neither_block_nor_allocate,
                a_group_that_is_dropped_leaves_nothing,
                trimming_waits_for_every_user;
        }
    };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::HostPairs;

    /// The themes that `.ci/prove-on-gpu` has in a table of lists.
    fn themes_in(table: &str) -> Vec<&'static str> {
        let script = include_str!("../../.ci/prove-on-gpu");
        let (_, table) = script.split_once(&format!("\n{table} = {{")).expect("the table");
        let (table, _) = table.split_once("\n}").expect("its end");
        let lists = table.split('[').skip(1).filter_map(|rest| rest.split_once(']'));
        lists.flat_map(|(list, _)| list.split('"').skip(1).step_by(2)).collect()
    }

    /// The themes of the suite.
    fn themes() -> BTreeSet<&'static str> {
        let checks = crate::conformance_suite!(list HostPairs);
        checks.iter().filter_map(|check| Some(check.name.split_once("::")?.0)).collect()
    }

    #[test]
    fn every_theme_is_in_one_part_of_the_proof() {
        let (parts, themes) = (themes_in("PROCESSES"), themes());
        assert_eq!(parts.iter().copied().collect::<BTreeSet<_>>(), themes);
        assert_eq!(parts.len(), themes.len(), "no theme is in two parts: {parts:?}");
    }

    /// A filter that fits no theme would show nothing.
    #[test]
    fn what_ranks_run_that_share_a_gpu_are_themes() {
        let (shared, themes) = (themes_in("SHARED"), themes());
        assert!(!shared.is_empty());
        for theme in shared {
            assert!(themes.contains(theme), "{theme}");
        }
    }
}
